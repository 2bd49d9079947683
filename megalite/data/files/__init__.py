"""Files of tokens: their format, their records, and how they come to be without a half one."""
