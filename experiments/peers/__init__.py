"""The job `peers`: strategies beside what people would run instead, in one process and in turn."""
