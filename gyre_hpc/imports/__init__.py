"""Other people's recordings, brought into a store of trajectory trees (`gyre trees import`)."""
