"""Other libraries' names for our attention functions: knows those names, computes no attention."""
