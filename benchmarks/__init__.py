"""Experiments that need a machine; nothing imports them."""
