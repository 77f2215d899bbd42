"""The parts of a `Subscription`: who has what, what waits to be sent again, and who gets it."""
