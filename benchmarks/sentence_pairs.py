"""Pairs of English sentences, written for this demo. The first of a pair is explained, the second is compared with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SentencePair:
    """Two sentences. `kind`: what they have in common (see `KINDS`)."""

    kind: str
    first: str
    second: str


#: paraphrase: one statement in other words. topic: other statements about one subject. negation: one of them says the opposite.
#: entity: one name, number, place or day differs.
KINDS = ("paraphrase", "topic", "negation", "entity")

PAIRS = tuple(
    SentencePair(*row)
    for row in (
        (
            "paraphrase",
            "The children built a sandcastle near the water.",
            "Close to the shore, some kids made a castle of sand.",
        ),
        ("paraphrase", "She fixed the leaking tap before breakfast.", "Early in the morning she repaired the dripping faucet."),
        ("paraphrase", "Our flight was delayed because of heavy fog.", "Thick mist made the plane leave late."),
        ("paraphrase", "The committee approved the budget without debate.", "The spending plan was passed with no discussion."),
        (
            "paraphrase",
            "A stray dog followed the postman home.",
            "The mail carrier was trailed to his house by a homeless hound.",
        ),
        ("paraphrase", "The soup needs a little more salt.", "This broth could use some extra seasoning."),
        ("paraphrase", "He learned to play the violin as a child.", "When he was small, he took up the fiddle."),
        ("paraphrase", "The old bridge can no longer carry lorries.", "Trucks have become too heavy for the ancient bridge."),
        ("paraphrase", "Bees pollinate most of the fruit we eat.", "Much of our fruit depends on pollination by bees."),
        ("paraphrase", "The baker sold his last loaf at noon.", "By midday the bakery had run out of bread."),
        ("paraphrase", "Her laptop battery lasts only two hours.", "Her notebook computer runs for just a couple of hours."),
        (
            "paraphrase",
            "The goalkeeper saved the decisive penalty.",
            "The keeper stopped the spot kick that settled the match.",
        ),
        (
            "paraphrase",
            "Many students work part time to pay their rent.",
            "To afford housing, lots of undergraduates hold jobs.",
        ),
        ("paraphrase", "The doctor advised him to drink less coffee.", "He was told by his physician to cut down on caffeine."),
        ("paraphrase", "Snow blocked the mountain road for three days.", "For three days the pass was closed by snowfall."),
        (
            "paraphrase",
            "The museum shop closes at five in the afternoon.",
            "You cannot buy anything at the gallery store after 5 pm.",
        ),
        ("paraphrase", "My grandmother grows tomatoes on her balcony.", "There are tomato plants on my granny's terrace."),
        ("topic", "Penguins huddle together to survive the winter.", "Emperor penguins feed on fish and krill."),
        (
            "topic",
            "The stock market fell sharply after the announcement.",
            "Investors bought shares of small companies in spring.",
        ),
        ("topic", "A violin has four strings and a wooden body.", "The orchestra rehearsed a symphony for the concert."),
        ("topic", "Vaccines train the immune system against viruses.", "The hospital hired more nurses for the flu season."),
        ("topic", "The rocket carried three satellites into orbit.", "Astronauts exercise daily aboard the space station."),
        ("topic", "Bread dough rises because yeast produces gas.", "He kneaded the flour and water for ten minutes."),
        ("topic", "The lawyer questioned the witness for an hour.", "The jury found the defendant guilty of fraud."),
        ("topic", "Cyclists want wider lanes on the main street.", "She rode her bike to work in the rain."),
        ("topic", "The volcano covered the village with ash.", "Lava flows slowly down the slopes of the mountain."),
        ("topic", "Farmers harvest the wheat at the end of July.", "A dry summer ruined the grain in many fields."),
        ("topic", "The programmer found a bug in the parser.", "Her team writes software tests before every release."),
        ("topic", "Chess players study openings for many years.", "The grandmaster sacrificed his queen to win."),
        ("topic", "The actress thanked the director of the film.", "Two hundred people queued at the cinema on Friday."),
        ("topic", "Whales breathe air at the surface of the sea.", "Sharks can smell blood in the ocean from far away."),
        ("topic", "The teacher explained fractions with slices of pizza.", "Pupils in this school learn algebra at twelve."),
        ("topic", "The carpenter sanded the oak table by hand.", "He keeps chisels and saws in his workshop."),
        ("negation", "The train to the airport is on time.", "The train to the airport is not on time."),
        ("negation", "Nobody in the office likes the new chairs.", "Everybody in the office likes the new chairs."),
        ("negation", "The patient has never smoked cigarettes.", "The patient has smoked cigarettes for years."),
        ("negation", "This medicine is safe for pregnant women.", "This medicine is unsafe during pregnancy."),
        ("negation", "The hotel does not allow pets in the rooms.", "Pets are welcome in all rooms of the hotel."),
        ("negation", "The experiment confirmed the theory.", "The experiment did not support the theory at all."),
        ("negation", "He forgot to lock the garden gate.", "He remembered to lock the gate of the garden."),
        ("negation", "The river is too cold for swimming.", "The river is warm enough to swim in."),
        ("negation", "The company refused to pay the fine.", "The company agreed that it would pay the fine."),
        ("negation", "There is no milk left in the fridge.", "There is plenty of milk in the fridge."),
        ("negation", "The painting is certainly a forgery.", "The painting is certainly not a fake."),
        ("negation", "Few guests stayed until midnight.", "Most of the guests stayed past midnight."),
        ("negation", "The software runs without an internet connection.", "The software cannot run offline."),
        ("negation", "The witness denied seeing the red car.", "The witness said that she had seen the red car."),
        ("negation", "The soil on this hill is not fertile.", "Crops grow well in the rich soil of this hill."),
        ("negation", "I would not recommend this restaurant to anyone.", "I recommend this restaurant to everyone I know."),
        ("entity", "Marie moved from Paris to Berlin in 2015.", "Marie moved from Paris to Madrid in 2015."),
        ("entity", "The Danube flows through Vienna and Budapest.", "The Seine flows through Paris and Rouen."),
        ("entity", "Mozart was born in Salzburg.", "Beethoven was born in Bonn."),
        ("entity", "The meeting starts on Monday at nine.", "The meeting starts on Thursday at nine."),
        ("entity", "Brazil won the final against Italy.", "Germany won the final against Argentina."),
        ("entity", "The recipe asks for two cups of sugar.", "The recipe asks for two cups of flour."),
        ("entity", "Mount Kilimanjaro is the highest peak in Africa.", "Mount Everest is the tallest mountain in Asia."),
        ("entity", "The ticket to London costs forty pounds.", "The ticket to Tokyo costs nine hundred dollars."),
        ("entity", "Alice lent her bicycle to Robert.", "Robert lent his bicycle to Alice."),
        ("entity", "The parliament of Norway sits in Oslo.", "The Swedish parliament sits in Stockholm."),
        ("entity", "Saturn is famous for its bright rings.", "Jupiter is famous for its giant red storm."),
        ("entity", "The red team scored three goals in the first half.", "The blue team scored one goal in the second half."),
        ("entity", "The cat slept on the sofa all afternoon.", "The dog slept on the carpet all morning."),
        ("entity", "Insulin is produced by the pancreas.", "Bile is produced by the liver."),
        ("entity", "The author wrote this novel in Spanish.", "The author wrote this poem in Portuguese."),
        ("entity", "Copper is a good conductor of electricity.", "Rubber is a poor conductor of electricity."),
    )
)
