"""Reads a store without opening it: what it holds, what is wrong with it, what each hole costs."""
