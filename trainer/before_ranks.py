"""What every one of several ranks would refuse, refused before they are started."""

from __future__ import annotations

import torch

from trainer.algorithms.check import check_algorithm
from trainer.architecture import read_architecture
from trainer.begin import Standing, new_model_folder
from trainer.hf_config import read_config
from trainer.layout import check_layout, check_model_layout
from trainer.rank_count import ranks_of
from trainer.settings import algorithm_settings, parallel_settings

__all__ = ["check_before_ranks"]


def check_before_ranks(standing: Standing) -> None:
    """Whether the layout and the algorithm can work; of a new run also whether the model fits.

    Starting ranks takes many seconds each, and they check the same again. Raises InvalidArgument,
    and NotFound where a new run's model is not there.
    """
    parallel = parallel_settings(standing.values)
    check_algorithm(algorithm_settings(standing.values))
    check_layout(parallel, ranks_of(standing.values), cuda=torch.cuda.is_available())
    if standing.kind != "new run":
        return
    model = read_architecture(read_config(new_model_folder(standing.values)))
    check_model_layout(
        parallel,
        num_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        num_experts=model.num_experts,
    )
