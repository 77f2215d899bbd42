"""The storages that come with the library; each passes `ackstate.cursor.testing.check_store`."""
