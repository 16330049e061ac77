"""The probe of the path of GPU memory, in jobs of its own, before a run."""
