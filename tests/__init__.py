"""A package of its own, not a namespace: the wheel of verl has a package of this name, which would come first."""
