"""Beyond one process: batch jobs and replicas."""
