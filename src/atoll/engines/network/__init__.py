"""Runs between real sites over NVFlare: kits, the coordinator, a site and its policy."""

__all__ = ["GUARD"]

GUARD = "atoll.engines.network.guard"  # the module that starts NVFlare behind its filter
