"""Why a method does what it does: the paper's analyses, as numbers and as figures.

| file | holds |
|---|---|
| `scene.py` | a source model and clean pictures, to be corrupted and adapted to: what every figure starts from |
| `figures.py` | a picture with the numbers behind it, and how it is drawn and saved |
| `attention.py` | attention weights of any supported model; their distance and their rollout |
| `embedding.py` | class tokens and conditioners, and how well they tell domains and classes apart |
| `distance.py`, `rollout.py`, `tsne.py` | the figures of those |
| `studies.py` | sensitivity, ablation, cost: grids of the bench, and their figures |
"""
