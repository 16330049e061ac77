"""Times of pipelines, predicted on a clock, and their pictures."""
