"""Reads a store without opening it, and reports its cursors, their damage, and the cost of each hole."""
