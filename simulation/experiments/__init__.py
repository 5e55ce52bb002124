"""Experiments that reproduce the papers' tables; each module registers itself with ``registry``."""
