"""Runs between real sites over NVFlare: kits, the coordinator, a site and its policy."""
