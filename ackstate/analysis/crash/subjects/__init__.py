"""The subjects of the package: the cursor, and a deliberately naive one."""
