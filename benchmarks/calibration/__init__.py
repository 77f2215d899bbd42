"""The check of the estimates: real cursors on real stores are killed and compared with the estimates."""
