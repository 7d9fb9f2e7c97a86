"""What a recipe will hold where, and whether it fits: pure functions of the recipe and of facts that are passed in."""
