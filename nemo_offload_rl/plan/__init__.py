"""Plans what a recipe will hold where, and whether it fits: pure functions of the recipe and of given facts."""
