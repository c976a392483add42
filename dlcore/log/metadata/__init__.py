"""What the metadata store holds of logs, and every change of it, planned and then applied."""
