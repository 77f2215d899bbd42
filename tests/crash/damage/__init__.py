"""L5: damaged media; `judgement` is the entry point."""

from crash.damage.judgement import damage

__all__ = ["damage"]
