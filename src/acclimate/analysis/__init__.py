"""Why a method does what it does: the paper's analyses, as numbers and as figures.

| file | holds |
|---|---|
| `attention_distance.py`, `rollout.py`, `tsne.py` | figures of attention and of class tokens |
| `sensitivity.py`, `ablation.py`, `cost.py`, `stream.py` | figures of accuracy and of time |
| `registry.py` | what a figure declares of itself, and which figures there are |
| `figures.py` | a figure with the numbers behind it, and how it is drawn, saved and read |
| `subject.py` | what every figure starts from: a testbed, and some of its images |
| `intervals.py` | intervals of paired differences over images, and verdicts |
| `attention.py` | attention weights of any supported model; their distance and their rollout |
| `embedding.py` | class tokens and conditioners, and how well they tell domains and classes apart |
| `clouds.py`, `scatter.py` | what `tsne.py` compares, and how points are marked |
| `variants.py` | runs of the bench that `sensitivity.py` and `ablation.py` compare |

A new figure is one file that declares `FIGURE`: `acclimate analyze` and `acclimate report` find it.
"""
