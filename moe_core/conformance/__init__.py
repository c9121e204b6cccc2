"""The contracts as pytest base classes, for whoever writes a part. Needs the extra
``conformance``; importing this package alone does not."""
