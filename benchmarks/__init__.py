"""Measurements that settled a choice; each says how it is called and what it counts."""
