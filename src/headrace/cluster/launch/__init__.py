"""From a run file to a job of Slurm, of KubeRay or of a Ray cluster."""
