"""One module a layer: what may happen to a store, from a wrong order of calls to a power cut and bad media."""
