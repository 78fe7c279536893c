"""The evaluation of methods: single runs, grids of runs, results and tables."""
