"""What other packages see of this one: one module for each. Importing one needs that package only where its docstring says so."""
