"""Images: data sets, cache, sampler and loader."""
