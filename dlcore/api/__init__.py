"""The public classes of namespaces and logs, whose back ends are in `dlcore.backends`."""
