"""The storages that come with the library; each passes `cursor.testing.check_store`."""
