"""L5: damaged media; `judgement` is the entry point."""

from ackstate.analysis.crash.layers.damage.judgement import damage

__all__ = ["damage"]
