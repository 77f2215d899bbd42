"""The storages that come with the library; each passes `ackstate.testing.check_store`."""
