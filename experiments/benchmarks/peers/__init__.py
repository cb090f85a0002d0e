"""Programs of other libraries and ours on one work, as a user would write them: `fit` of each."""
