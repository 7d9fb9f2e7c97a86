"""Saves and loads a rank's training state, in the foreground or while training goes on."""
