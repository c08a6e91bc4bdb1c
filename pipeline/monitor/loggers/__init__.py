"""Programs that receive metrics besides metrics.jsonl.

To add one, subclass `Logger` in a file of this folder, list the class in LOGGERS, and add its name to
`train.report_to` (../config.py).
"""

from .logger import Logger
from .trackers import MLflow, TensorBoard, Trackio, WeightsAndBiases

LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
