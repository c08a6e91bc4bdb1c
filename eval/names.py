"""Names that several modules share, here so that the light ones need not import the heavy ones."""

TASK_ORDER = [
    "tweet_emotion",
    "sst2",
    "trec",
    "subj",
    "cr",
    "rotten_tomatoes",
    "ag_news",
    "mmlu",
]  # the paper's
SCORES = ("openicl_ppl", "suffix_sum", "suffix_mean")  # from one forward
EXTRA_SCORES = ("channel", "calibrated")  # each a forward of its own
