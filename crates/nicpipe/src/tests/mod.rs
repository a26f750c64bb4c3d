mod cases;
mod hostile;
mod jumbo;
mod mutations;
mod order;
mod shared;
mod world;
