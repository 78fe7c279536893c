"""Papers whose tables can be run again."""
