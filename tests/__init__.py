"""Makes this folder a regular package: verl's wheel has a package of the same name, which would shadow a namespace."""
