"""The layers, one module each: from a wrong order of calls to power cuts and damaged media."""
