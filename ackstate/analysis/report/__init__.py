"""The report of `ackstate redelivery` and `ackstate sweep`: one HTML file for operators of brokers."""
