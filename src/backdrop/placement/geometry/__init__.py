"""Which cells of the input a position depends on: along one axis (`reach`), and through each layer (`rules`)."""
