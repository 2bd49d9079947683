"""A resolved run as others read it: written, compared, summarised, and its memory on a rank."""
