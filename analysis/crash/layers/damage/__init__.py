"""L5: damaged media; `judgement` begins it."""

from ackstate.analysis.crash.layers.damage.judgement import damage

__all__ = ["damage"]
