"""Behind `acclimate.bench`: one run, many runs, results and tables."""
