"""How many acked messages would come back if the broker died, at every instant of a trace."""
