"""What the harness ships to be crashed: our cursor, and one that is deliberately naive."""
