"""The base of all packages: values, errors, configuration, the clock, and background tasks."""
