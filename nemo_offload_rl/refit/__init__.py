"""Refit: moving the policy's weights from the training worker to the generation engine."""
