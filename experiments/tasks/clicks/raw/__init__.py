"""Raw files of tab-separated lines: a description of the columns, and fields read at once."""
