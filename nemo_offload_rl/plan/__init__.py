"""Plans which memory each phase of a recipe takes, and whether it fits, as pure functions of recipe and sizes."""
