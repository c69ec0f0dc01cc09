"""The words that go into the slots of templates, by table.

How they are placed is `fill`. A word may have slots itself.
"""

from __future__ import annotations


def _tables(text: str) -> dict[str, tuple[str, ...]]:
    """Read paragraphs of the form `name: word; word; ...`."""
    parts = (part.partition(":") for part in text.strip().split("\n\n"))
    return {
        name.strip(): tuple(word.strip() for word in " ".join(words.split()).split(";"))
        for name, _, words in parts
    }


_PEOPLE = _tables("""
girls: Amara; Bianca; Carla; Dalia; Elena; Farah; Greta; Hana; Ines; Jana; Keiko; Leila; Mina; Nora;
Olga; Priya; Rosa; Selma; Tara; Una; Vera; Wanda; Ximena; Yara; Zoe; Abigail; Beth; Chloe; Daisy;
Emma; Fiona; Grace; Holly; Ivy; Julia; Kate; Lucy; Megan; Nina; Olivia; Penny; Ruth; Sofia; Tessa;
Violet; Willa; Mrs. Okafor; Mrs. Lindqvist; Ms. Ferreira; Aunt May; Grandma; Aisha; Ingrid; Mei;
Noor; Paloma; Samira; Thandiwe

boys: Amir; Boris; Cyrus; Diego; Emil; Felix; Goran; Hugo; Ivan; Jonas; Kofi; Luca; Mateo; Nils;
Omar; Pavel; Quentin; Rafael; Stefan; Tariq; Umar; Viktor; Wei; Yusuf; Zane; Adam; Ben; Caleb;
Daniel; Ethan; Frank; George; Henry; Isaac; Jack; Kevin; Liam; Marcus; Noah; Oscar; Peter; Rohan;
Sam; Theo; Vince; Walter; Mr. Abara; Mr. Novak; Mr. Castellano; Uncle Leo; Grandpa; Arjun; Bashir;
Kenji; Mohammed; Santiago; Tomas
""")
GIRLS, BOYS = _PEOPLE["girls"], _PEOPLE["boys"]

# Countable words take a plain s.
WORDS: dict[str, tuple[str, ...]] = _tables("""
thing: apple; pencil; marble; sticker; book; card; cookie; button; balloon; seashell; stamp; orange;
lemon; coin; muffin; bead; notebook; toy car; eraser; plum; walnut; magnet; postcard; cupcake;
bagel; candle; ribbon; comic; crayon; ticket; bracelet; puzzle; donut; lollipop; acorn; egg; rose;
tulip; sock; badge; pretzel; pear; mango; pebble; keychain; poster; bookmark

goods: T-shirt; mug; lamp; chair; backpack; umbrella; hat; blanket; clock; basketball; kite; pillow;
vase; board game; water bottle; paint set; flower pot; plant; helmet; tent; speaker; picture frame;
bowl; basket; notebook; calculator; jigsaw puzzle; cushion; ruler; storybook

baked: muffin; cupcake; pie; cookie; bagel; roll; tart; brownie; pancake; scone; waffle; donut

crop: tomato plant; apple tree; sunflower; cabbage; pumpkin; pepper plant; rose bush; carrot; bean
plant; pear tree; tulip; melon

animal: goat; cow; horse; hen; duck; rabbit; dog; cat; parrot; turtle; llama; pony; hamster; donkey;
pig

shop: bakery; bookstore; toy store; corner shop; garden center; market stall; hardware store; gift
shop; sports shop; craft shop; farm stand; music shop; clothing store; pet store

weekday: Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday

month: January; February; March; April; May; June; July; August; September; October; November;
December

chore: mowing lawns; walking dogs; washing cars; babysitting; raking leaves; delivering newspapers;
tutoring; shoveling snow; painting fences; cleaning windows; watering gardens; fixing bikes

wish: bicycle; tablet; guitar; telescope; camera; drum kit; game console; violin; skateboard; sewing
machine; laptop; tent; train ticket; new phone; microscope

vehicle: car; bus; truck; van; train; motorcycle; tram; delivery van; taxi; camper

liquid: water; milk; lemonade; paint; oil; juice; soup; syrup; vinegar; iced tea

container: box; bag; jar; basket; crate; tray; pack; bin; tin; carton

group: class; choir; sports club; scout troop; summer camp; drama club; orchestra; chess club;
hiking group; dance school

color: red; blue; green; yellow; purple; white; black; orange; brown; gray; pink; silver

fruit: apples; pears; bananas; grapes; cherries; plums; oranges; peaches; blueberries; strawberries

worker: carpenter; painter; gardener; tailor; plumber; potter; mechanic; programmer; baker; weaver

place: library; museum; theater; swimming pool; stadium; zoo; aquarium; park; gym; cinema; concert
hall

science: photosynthesis; gravity; black holes; the water cycle; vaccines; plate tectonics; DNA;
evolution; magnetism; entropy; antibiotics; lightning; tides; the ozone layer; cell division;
enzymes; the immune system; radioactivity; sound waves; superconductors; the greenhouse effect;
rainbows; chemical bonds; stem cells; volcanoes; quantum entanglement; osmosis; fermentation; the
carbon cycle

tech: blockchain; cloud computing; recursion; neural networks; public-key encryption; databases;
GPS; machine learning; operating systems; compilers; the internet; solar panels; electric cars; 3D
printing; computer viruses; version control; search engines; touch screens; batteries; web cookies;
hash tables; object-oriented programming; virtual reality; fiber optics; big-O notation; REST APIs;
containers

past: the Roman Empire; the French Revolution; the Industrial Revolution; the Silk Road; the Cold
War; the Renaissance; ancient Egypt; the printing press; the Black Death; the Ottoman Empire; the
space race; the Great Depression; the Vikings; the Mongol Empire; the fall of the Berlin Wall; the
Enlightenment; women's suffrage; the Meiji Restoration; the Bronze Age; the Haitian Revolution; the
Age of Exploration

idea: free will; utilitarianism; democracy; stoicism; justice; existentialism; capitalism; privacy;
inflation; supply and demand; opportunity cost; cultural identity; globalization; cognitive bias;
civil disobedience; minimum wage; universal basic income; moral relativism; urbanization; game
theory

hobby: photography; gardening; chess; hiking; baking; knitting; playing the piano; bird watching;
swimming; yoga; painting; running; camping; learning languages; board games; woodworking; cycling;
cooking; pottery; rock climbing; stargazing; dancing; creative writing; fishing; calligraphy

job: teacher; nurse; software engineer; chef; journalist; architect; pilot; lawyer; farmer;
librarian; firefighter; graphic designer; detective; dentist; translator; data analyst; museum
guide; carpenter; marketing manager; veterinarian; electrician; tour guide; project manager;
personal trainer; astronaut

city: Lisbon; Kyoto; Cairo; Toronto; Nairobi; Lima; Prague; Istanbul; Melbourne; Vienna; Mumbai;
Oslo; Mexico City; Seoul; Marrakesh; Chicago; Athens; Buenos Aires; Edinburgh; Hanoi; Cape Town;
Barcelona

country: Portugal; Japan; Egypt; Canada; Kenya; Peru; Norway; Turkey; Australia; India; Brazil;
Vietnam; Greece; Morocco; Iceland; South Korea; Argentina; Poland; Ghana; Switzerland; Mexico; New
Zealand

language: French; Spanish; German; Italian; Portuguese; Japanese; Dutch; Swedish; Turkish; Latin

dish: lentil soup; vegetable curry; pancakes; pasta with tomato sauce; fried rice; banana bread;
tacos; a Greek salad; chicken stew; an omelette; mushroom risotto; apple pie; hummus; stir-fried
noodles; chili

feeling: loneliness; joy; jealousy; courage; hope; grief; curiosity; gratitude; fear; pride;
nostalgia

habit: sleep; posture; time management; memory; concentration; handwriting; vocabulary; fitness;
diet; public speaking; patience; spending habits; writing style; listening skills; morning routine

creature: dragon; talking cat; lonely robot; ghost; clever fox; tired dragon hunter; young wizard;
lost astronaut; brave mouse; old lighthouse keeper; time traveler; grumpy troll; mermaid; retired
pirate; street musician; shy giant; detective; baker with a secret; penguin who cannot swim;
clockmaker

setting: a small village; an abandoned station; a desert; a floating city; a library at night; a
submarine; a mountain hut; a crowded market; a distant planet; a circus; an old castle; a rainy
harbor; a forest

firm: coffee shop; bookshop; yoga studio; bike repair shop; mobile game studio; online clothing
store; pet hotel; language school; food truck; travel agency; bakery; cleaning service; solar
company; gym

product: reusable water bottle; noise-canceling headphone; smart lamp; folding bike; standing desk;
garden tool set; language app; electric kettle; backpack; fitness watch; desk fan; children's book;
hand cream

event: birthday party; wedding; school reunion; company picnic; charity run; book fair; farewell
party; science fair; housewarming; team workshop; neighborhood cleanup; concert; graduation party

issue: plastic waste; air pollution; traffic jams; food waste; homelessness; loneliness in cities;
noise; deforestation; water shortage; school bullying; misinformation; rising rents; screen
addiction; hunger

debate: school uniforms; remote work; social media; nuclear power; zoos; homework; a four-day week;
fast fashion; space travel; electric cars; tourism; video games; artificial intelligence; public
transport; organic food; online learning; cash; daylight saving time; voting at 16; cars in city
centers

saying: actions speak louder than words; practice makes perfect; time is money; less is more; every
cloud has a silver lining; a stitch in time saves nine; the early bird catches the worm; look before
you leap

style: a pirate; a sports reporter; a fairy tale; a weather forecast; a detective novel; a news
anchor; a five-year-old; an old professor; a text message; a movie trailer; a formal letter; a poem;
a robot

noun: apple; river; stone; cloud; paper; lamp; garden; winter; silver; maple; forest; candle;
bridge; window; pencil; rocket; island; mirror; thunder; velvet; anchor; basket; copper; dragon;
ember; falcon; harbor; jungle; kitten; lemon; marble; needle; ocean; pepper; quartz; ribbon; saddle;
timber; umbrella; violet; walnut; yellow; zebra; level; radar; banana; coffee; letter; summer; tree;
sky; sea; map; key; owl

sentence: The train was late, so we missed the start of the film.; <name> forgot <his> umbrella at
the <shop>.; I would like a table for <two|three|four> near the window.; The <animal> slept while
the <animal2> watched the door.; We should leave before it gets dark.; My <product> broke after
<two|three|six> weeks.; The old <job> smiled and closed the <container>.; Nobody knew why the
<place> was closed on <weekday>.; If it rains tomorrow, the <event> will be inside.; She has lived
in <city> since <month>.; Please send me the report by <weekday>.; The <color> <vehicle> stopped in
front of the <place>.; They laughed, but <name> did not think it was funny.; Learning <language>
takes time and patience.; Could you turn the music down a little?

mistake: She don't like <hobby>.; Me and <name> goes to the <place> every <weekday>.; I have saw
this film <two|three> times.; The <animal>s is hungry, they wants food.; Their going to <city> in
<month>, isn't it?; He runned to the <shop> because he was to late.; There is less people here then
last year.; If I would have time, I will visited <city>.; Everyone have they're own <goods>.; I am
living here since <two|five|ten> years.
""")
WORDS["name"] = GIRLS + BOYS
